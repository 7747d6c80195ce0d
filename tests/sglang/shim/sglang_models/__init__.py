"""SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang imports the models that this package has, rather than all its own."""
