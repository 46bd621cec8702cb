"""Training records that give away what models are measured on."""
