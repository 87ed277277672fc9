"""The hot loops: encoding records, decoding them into columns, murmur2."""
