"""SGLang's own Llama."""

from sglang.srt.models.llama import LlamaForCausalLM

EntryClass = LlamaForCausalLM
