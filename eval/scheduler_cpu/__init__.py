"""CPU time of the scheduler thread per request, without the model: HiState beside stock SGLang."""
