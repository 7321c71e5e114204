"""Models of the custom resources, every name that appears on an object, and the generation of CRDs from the models."""
