"""The simulated world (`kvcore.sim`): the event loop, the ports, the engine and the oracles that watch them."""
