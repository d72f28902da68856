"""The user's side: public functions, error messages, compile and cache, emulation, command line."""
