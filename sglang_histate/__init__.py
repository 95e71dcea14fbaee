"""HiState for SGLang: hierarchical prefix caching for hybrid (attention + recurrent) models."""

__version__ = "0.1.0"
