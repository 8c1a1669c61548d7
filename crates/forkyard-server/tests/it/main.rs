mod stream;
mod websocket;
mod world;
