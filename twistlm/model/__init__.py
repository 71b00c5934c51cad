"""Models as blocks: families, the block algebra, subnets, flat layouts, the central tensors."""
