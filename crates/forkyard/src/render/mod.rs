//! From views to text: pure functions over what the store says, and one writer that keeps a live picture on a terminal.

pub mod board;
pub mod closing;
pub mod live;
pub mod plain;
pub mod session;
pub mod style;
pub mod table;

#[cfg(test)]
pub(crate) mod fixture;

pub use board::Board;
pub use plain::{fit, plain, plain_block, width, wrap};
pub use style::{Color, Style};
pub use table::{Cell, Table};
