//! The Temporal engine: the pure machines driven by workflows, the engine's own activities performed by workers. No business
//! logic is here: what to do is decided in `forkyard-core`, how it is done in `forkyard-engine`.
