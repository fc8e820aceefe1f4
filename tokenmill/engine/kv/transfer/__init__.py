"""Pages between engines: staged and served by the one that computed them, fetched by the one that decodes."""
