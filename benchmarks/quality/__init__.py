"""Does training with these optimizers end where fp32 AdamW ends? One module an experiment; see docs/quality.md."""
