"""What tests share: shapes, tolerances with their reasons, and reference implementations written from the design."""
