.PHONY: e2e-rdma
e2e-rdma: setup ## the data path over soft-RoCE and NFS over RDMA in a virtual machine (root; 3 GB; about 2 minutes)
	e2e/rdma/run.sh
