"""How the optimizers work inside other libraries. Nothing here imports one of them before it is in use."""
