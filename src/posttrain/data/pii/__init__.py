"""Finding what tells who a person is: one kind a detector, listed in `posttrain.data.pii.detect`."""
