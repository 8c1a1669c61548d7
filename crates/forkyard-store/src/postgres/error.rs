use sqlx::Error;

use crate::StoreError;

/// Every error of PostgreSQL by what the caller does about it.
impl From<Error> for StoreError {
    fn from(error: Error) -> StoreError {
        let text = error.to_string();
        match &error {
            Error::PoolTimedOut => StoreError::Unavailable(format!(
                "PostgreSQL gave no connection within {} s: it is away, stands still, or has too many",
                super::ACQUIRE_TIMEOUT.as_secs()
            )),
            Error::Database(e) => by_code(e.code().as_deref().unwrap_or_default(), text),
            Error::Configuration(_) | Error::InvalidArgument(_) | Error::Encode(_) => {
                StoreError::Invalid(text)
            }
            Error::ColumnDecode { .. }
            | Error::Decode(_)
            | Error::RowNotFound
            | Error::ColumnNotFound(_)
            | Error::ColumnIndexOutOfBounds { .. }
            | Error::TypeNotFound { .. } => StoreError::Corrupt(text),
            // The rest is the way to the server (the enum is sqlx's, and open).
            _ => StoreError::Unavailable(text),
        }
    }
}

fn by_code(code: &str, text: String) -> StoreError {
    let text = format!("{text} (SQLSTATE {code})");
    match (&code.get(..2).unwrap_or_default(), code) {
        (_, "53100") => StoreError::Full(text),
        (_, "XX001" | "XX002") => StoreError::Corrupt(text),
        // Values and constraints.
        (&"22" | &"23" | &"54", _) => StoreError::Invalid(text),
        // A schema that is not ours.
        (&"42", _) => StoreError::Corrupt(text),
        // Shutting down, starting up, out of connections, a timeout, a lost session, a refused login.
        _ => StoreError::Unavailable(text),
    }
}
