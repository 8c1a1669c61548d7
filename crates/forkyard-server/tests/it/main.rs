mod inside;
mod runs;
mod stream;
mod websocket;
mod world;
