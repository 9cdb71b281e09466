"""What is trained: models as lists of layer graphs."""
