"""ctxfs: a mount that keeps LLM context as files, on DRAM and NVMe."""

__version__ = "0.1.0"
