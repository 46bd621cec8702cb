"""What is done to a model's inside while it trains so that it does not lean on chance: noise, dropout, attacks."""
