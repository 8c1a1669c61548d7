//! Tokens of the API.

use forkyard_core::{Millis, Timestamp};
use forkyard_store as store;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::mirror;
use crate::error::{ApiError, Result};

const MAX_NAME_CHARS: usize = 100;
/// Who steers at the machine itself is called so, with a user after it; no token may be.
const LOCAL: &str = "local";
const MAX_LIFETIME: Millis = Millis::secs(10 * 366 * 24 * 3600);

mirror!(
    /// What a token may do; each includes those before it.
    Scope of store::Scope, "snake_case" { Read, Steer, Admin }
);

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Token {
    pub id: String,
    pub name: String,
    pub scope: Scope,
    /// Milliseconds since 1970.
    pub created_at: u64,
    pub expires_at: Option<u64>,
    pub revoked_at: Option<u64>,
}

impl From<store::Token> for Token {
    fn from(t: store::Token) -> Token {
        let ms = |t: Option<Timestamp>| t.map(|t| t.0);
        Token {
            id: t.id,
            name: t.name,
            scope: t.scope.into(),
            created_at: t.created_at.0,
            expires_at: ms(t.expires_at),
            revoked_at: ms(t.revoked_at),
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Tokens {
    pub tokens: Vec<Token>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// Who or what it is for: not `local` or `local:…`, which are those at the machine itself.
    #[schema(min_length = 1, max_length = 100)]
    pub name: String,
    pub scope: Scope,
    /// It ends after this time; never if it is not said.
    #[serde(default)]
    pub lifetime_ms: Option<u64>,
}

impl CreateToken {
    /// What can be made.
    pub fn checked(self) -> Result<CreateToken> {
        let name = self.name.trim().to_string();
        if name.is_empty() || name.chars().count() > MAX_NAME_CHARS || name.chars().any(char::is_control) {
            return Err(ApiError::field("name", name, "can't be used", "write 1 to 100 characters"));
        }
        let first = name.split(':').next().unwrap_or_default().trim_end();
        if first.eq_ignore_ascii_case(LOCAL) {
            return Err(ApiError::field(
                "name",
                name,
                "is for those who steer at the machine itself",
                "choose one that does not begin with local:",
            ));
        }
        match self.lifetime_ms {
            Some(ms) if ms == 0 || ms > MAX_LIFETIME.0 => Err(ApiError::field(
                "lifetime_ms",
                ms.to_string(),
                "is out of range",
                "give 1 ms to ten years",
            )),
            Some(_) | None => Ok(CreateToken { name, ..self }),
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct NewToken {
    #[serde(flatten)]
    pub about: Token,
    /// Shown this once.
    pub token: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn no_token_is_named_like_somebody_at_the_machine() {
        let named =
            |name: &str| CreateToken { name: name.into(), scope: Scope::Read, lifetime_ms: None }.checked();
        for bad in ["local", "local:root", "LOCAL:root", " Local", "local :root", "lOcAl:"] {
            assert_eq!(named(bad).unwrap_err().code, Code::Invalid, "{bad}");
        }
        for good in ["locale", "local-ci", "my local:root", "owner"] {
            assert_eq!(named(good).unwrap().name, good);
        }
    }
}
