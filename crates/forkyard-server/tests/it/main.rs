mod inside;
mod stream;
mod websocket;
mod world;
