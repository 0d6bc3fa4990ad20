"""Facts about a Hugging Face model and its device: cached files, limits, devices, expert routing."""
