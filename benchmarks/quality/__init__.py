"""Does training with these optimizers end where fp32 AdamW ends? One module for each experiment; see docs/quality.md."""
