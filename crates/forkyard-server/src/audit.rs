//! Who steered what, by the tokens of this API.

use forkyard_engine::steer::{By, Steering};
use serde_json::Value;

use crate::App;
use crate::access::Principal;
use crate::error::Result;

impl Principal {
    pub(crate) fn by(&self) -> By {
        By { token: self.owner().to_string(), who: self.name.clone() }
    }
}

impl App {
    pub(crate) fn steering<'a>(&'a self, by: &'a By) -> Steering<'a> {
        Steering { store: self.store(), now: self.now(), by }
    }

    pub(crate) async fn record(
        &self,
        by: &Principal,
        action: &str,
        target: &str,
        detail: Value,
    ) -> Result<()> {
        Ok(self.steering(&by.by()).record(action, target, detail).await?)
    }
}
