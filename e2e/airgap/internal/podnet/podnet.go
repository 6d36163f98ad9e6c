// Package podnet is the pod network of a node. It stands in for kind's kindnetd, whose source is a Go
// module of its own that the Go module proxy does not carry. It writes the node's CNI configuration from
// its podCIDR, keeps a route to every other node's podCIDR, masquerades what leaves the pod network, and enforces
// NetworkPolicies (package netpol). Each pod hangs on a veth of its own, so whatever pods send each other is routed by
// the node and passes its FORWARD chain, between pods of one node too. IPv4 only.
package podnet

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"kvpool.dev/airgap/internal/netpol"
)

const (
	configPath = "/etc/cni/net.d/10-kindnet.conflist" // kind's own name for it
	config     = `{"cniVersion":"0.3.1","name":"kindnet","plugins":[
{"type":"ptp","ipMasq":false,"mtu":1500,"ipam":{"type":"host-local","dataDir":"/run/cni-ipam-state",
"routes":[{"dst":"0.0.0.0/0"}],"ranges":[[{"subnet":%q}]]}},
{"type":"portmap","capabilities":{"portMappings":true}}]}
`
	masqueradeChain = "KIND-MASQ-AGENT"
	syncTimeout     = 10 * time.Second
	retryEvery      = 500 * time.Millisecond // while a node has no podCIDR yet, or after an error
	refreshEvery    = 5 * time.Second
)

// errIncomplete says that some node has no address or podCIDR yet.
var errIncomplete = errors.New("some node has no podCIDR yet")

// Main runs the node's network agent until the process is ended.
func Main() {
	cluster, err := rest.InClusterConfig()
	if err != nil {
		log.Fatal(err)
	}
	// Before kube-proxy has run the service address leads nowhere; kind passes the real one.
	if endpoint := os.Getenv("CONTROL_PLANE_ENDPOINT"); endpoint != "" {
		cluster.Host = "https://" + endpoint
	}
	cluster.ContentType = runtime.ContentTypeProtobuf // the agent has a tenth of a processor
	client := kubernetes.NewForConfigOrDie(cluster)
	hostIP := os.Getenv("HOST_IP")
	go netpol.Run(context.Background(), client, hostIP)
	podSubnets := strings.Split(os.Getenv("POD_SUBNET"), ",")
	for {
		err := sync(client, hostIP)
		if err == nil {
			err = masquerade(podSubnets)
		}
		if err != nil {
			log.Print(err)
			time.Sleep(retryEvery)
			continue
		}
		time.Sleep(refreshEvery)
	}
}

func sync(client kubernetes.Interface, hostIP string) error {
	ctx, cancel := context.WithTimeout(context.Background(), syncTimeout)
	defer cancel()
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	incomplete := false
	for i := range nodes.Items {
		node := &nodes.Items[i]
		address := internalIPv4(node)
		switch {
		case address == "" || node.Spec.PodCIDR == "":
			incomplete = true
		case address == hostIP:
			err = writeConfig(node.Spec.PodCIDR)
		default:
			err = route(node.Spec.PodCIDR, address)
		}
		if err != nil {
			return err
		}
	}
	if incomplete {
		return errIncomplete
	}
	return nil
}

func internalIPv4(node *corev1.Node) string {
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP && net.ParseIP(a.Address).To4() != nil {
			return a.Address
		}
	}
	return ""
}

// writeConfig replaces the CNI configuration in one step: containerd watches the folder.
func writeConfig(podCIDR string) error {
	want := fmt.Sprintf(config, podCIDR)
	if have, err := os.ReadFile(configPath); err == nil && string(have) == want {
		return nil
	}
	partial := filepath.Join(filepath.Dir(configPath), ".10-kindnet.partial")
	if err := os.WriteFile(partial, []byte(want), 0o644); err != nil {
		return err
	}
	log.Printf("pod network %s", podCIDR)
	return os.Rename(partial, configPath)
}

func route(podCIDR, via string) error {
	_, destination, err := net.ParseCIDR(podCIDR)
	if err != nil {
		return err
	}
	if err := netlink.RouteReplace(&netlink.Route{Dst: destination, Gw: net.ParseIP(via)}); err != nil {
		return fmt.Errorf("route %s via %s: %w", destination, via, err)
	}
	return nil
}

func masquerade(podSubnets []string) error {
	_ = iptables("-N", masqueradeChain) // fails where the chain is there already
	leavesNode := []string{"-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", masqueradeChain}
	if err := ensureRule("POSTROUTING", leavesNode...); err != nil {
		return err
	}
	for _, subnet := range podSubnets {
		if err := ensureRule(masqueradeChain, "-d", subnet, "-j", "RETURN"); err != nil {
			return err
		}
	}
	return ensureRule(masqueradeChain, "-j", "MASQUERADE")
}

func ensureRule(chain string, rule ...string) error {
	if iptables(append([]string{"-C", chain}, rule...)...) == nil {
		return nil
	}
	return iptables(append([]string{"-A", chain}, rule...)...)
}

func iptables(args ...string) error {
	out, err := exec.Command("iptables", append([]string{"-w", "5", "-t", "nat"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("iptables %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}
