//! What goes over the wire. Apart from what is stored, so that either can change without the other.

pub mod about;
pub mod chores;
pub mod event;
pub mod fork;
pub mod result;
pub mod run;
pub mod sandbox;
pub mod token;

/// Bytes as they are.
#[derive(utoipa::ToSchema)]
#[schema(value_type = String, format = Binary)]
pub struct Raw(pub Vec<u8>);

/// A closed set of words, the same as the core's. The style is a `tt`: as a `literal` derives would not see into it.
macro_rules! mirror {
    ($(#[$meta:meta])* $name:ident of $core:ty, $style:tt { $($case:ident),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
        #[serde(rename_all = $style)]
        pub enum $name { $($case),+ }

        impl From<$core> for $name {
            fn from(core: $core) -> $name {
                match core { $(<$core>::$case => $name::$case),+ }
            }
        }
        impl From<$name> for $core {
            fn from(dto: $name) -> $core {
                match dto { $($name::$case => <$core>::$case),+ }
            }
        }
    };
}
pub(crate) use mirror;
