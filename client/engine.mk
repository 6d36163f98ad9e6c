.PHONY: test-engines test-conversations test-gpu test-vllm-newest
NEWEST_VLLM ?= $(or $(KVPOOL_CACHE),$(HOME)/.cache/kvpool)/vllm-newest

test-engines: setup ## the plug-ins inside real engines on the CPU (about 6 GB of engine in the cache)
	client/tests_engine/tools.sh
	$(PY) -m pytest client/tests_engine --timeout 900 $(ARGS)

test-conversations: setup ## 500 conversations that change between two engines at each turn, vLLM and SGLang, compared token by token
	client/tests_engine/tools.sh
	KVPOOL_CONVERSATIONS=500 $(PY) -m pytest client/tests_engine/test_en_conversations.py client/tests_engine/test_en_sglang_server.py \
	  --timeout 3600 $(ARGS) -k "witness or never_moved or without_any_cache or is_found"

test-gpu: setup ## the vLLM tests with a GPU's own copies (ENGINE_PYTHON=python of an environment with vLLM 0.32 or 0.33)
	@if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then echo "test-gpu: skipped, there is no NVIDIA GPU on this machine"; \
	elif [ ! -x "$(ENGINE_PYTHON)" ]; then \
	  echo "test-gpu: say ENGINE_PYTHON=/path/to/python, of an environment with vLLM 0.32 or 0.33 for this GPU" >&2; exit 2; \
	else KVPOOL_GPU_PYTHON="$(ENGINE_PYTHON)" $(PY) -m pytest client/tests_engine/test_en_vllm.py \
	  client/tests_engine/test_en_conversations.py client/tests_engine/test_en_bfloat16.py client/tests_engine/test_en_models.py --timeout 900 $(ARGS); fi

test-vllm-newest: setup ## vLLM's tiering manager of the newest release or pre-release; for CI, downloads about 0.4 GB that is not pinned
	rm -rf "$(NEWEST_VLLM)"
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --pre --only-binary :all: --target "$(NEWEST_VLLM)" vllm
	find "$(NEWEST_VLLM)" -name '*.so*' -delete
	KVPOOL_VLLM_NEWEST="$(NEWEST_VLLM)" $(PY) -m pytest client/tests_engine/test_en_vllm_versions.py -k newest --timeout 900 $(ARGS)
