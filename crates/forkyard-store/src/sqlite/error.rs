use rusqlite::{Error, ErrorCode, ffi};

use crate::StoreError;

/// Every error of SQLite by what the caller does about it.
impl From<Error> for StoreError {
    fn from(error: Error) -> StoreError {
        let text = error.to_string();
        match error.sqlite_error() {
            // The shared memory file could not grow: the same as a full disk.
            Some(e) if e.code == ErrorCode::DiskFull || e.extended_code == ffi::SQLITE_IOERR_SHMSIZE => {
                StoreError::Full(text)
            }
            Some(e) if matches!(e.code, ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
                StoreError::Corrupt(text)
            }
            Some(e) if matches!(e.code, ErrorCode::TooBig | ErrorCode::ConstraintViolation) => {
                StoreError::Invalid(text)
            }
            Some(_) => StoreError::Unavailable(text),
            // A column of another type, text that is not UTF-8: not written by us.
            None => StoreError::Corrupt(text),
        }
    }
}

/// Another connection holds the lock that was asked for.
pub(super) fn is_busy(error: &Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}
