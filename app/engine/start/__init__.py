"""How a run starts: device, folder, the checkpoint that it resumes, data, tokenizer."""
