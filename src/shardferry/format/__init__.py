"""safetensors bytes and Hugging Face index files, parsed strictly into a CheckpointIndex."""
