"""SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang looks here first, and does not import all of its models to find one."""
