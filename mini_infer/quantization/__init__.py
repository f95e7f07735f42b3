"""Number formats of fewer bits: what weights and activations become, and how files hold them. No model knows of it."""
