.PHONY: test-engines test-gpu
test-engines: setup ## the plug-ins inside real engines on the CPU (about 6 GB of engine in the cache)
	client/tests_engine/tools.sh
	$(PY) -m pytest client/tests_engine --timeout 900 $(ARGS)

test-gpu: setup ## the vLLM tests with a GPU's own copies (ENGINE_PYTHON=python of an environment with vLLM 0.32 or 0.33)
	@if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then echo "test-gpu: skipped, there is no NVIDIA GPU on this machine"; \
	elif [ ! -x "$(ENGINE_PYTHON)" ]; then \
	  echo "test-gpu: say ENGINE_PYTHON=/path/to/python, of an environment with vLLM 0.32 or 0.33 for this GPU" >&2; exit 2; \
	else KVPOOL_GPU_PYTHON="$(ENGINE_PYTHON)" $(PY) -m pytest client/tests_engine/test_en_vllm.py \
	  client/tests_engine/test_en_conversations.py client/tests_engine/test_en_bfloat16.py client/tests_engine/test_en_models.py --timeout 900 $(ARGS); fi
