"""What stays through a step: parameters, gradients, optimizer state; updates and shards of them."""
