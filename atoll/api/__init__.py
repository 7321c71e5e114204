"""Models of the custom resources, all names that appear on objects, and the generation of CRDs from the models."""
