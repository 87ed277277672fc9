"""Every operation that changes several files or stores, with a crash or an error at each of its calls."""
