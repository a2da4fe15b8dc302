"""Checkpoints: Hugging Face safetensors (`hf`) and the native training format (`native`)."""
