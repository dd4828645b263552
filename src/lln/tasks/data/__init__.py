"""Data for the experiments: text, tokenizers, masking, GLUE and images, from files, from the hub, or from nothing."""
