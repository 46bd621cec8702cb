"""The value of training records by Shapley values and data-OOB, and their influence on answers by EK-FAC."""
