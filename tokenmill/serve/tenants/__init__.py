"""Keys, their limits and shares, and the salts that divide the prefix cache between them."""
