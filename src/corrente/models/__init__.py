"""What is known of a Hugging Face model and its device: cached files, limits, devices, expert routing."""
