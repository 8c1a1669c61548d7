mod inside;
mod inside_bounds;
mod listen;
mod revoked;
mod runs;
mod stream;
mod websocket;
mod world;
