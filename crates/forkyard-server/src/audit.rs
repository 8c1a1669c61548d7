//! Who steered what: recorded before it is done, so that nothing is done unrecorded.

use forkyard_store::Deed;
use serde_json::Value;

use crate::App;
use crate::access::Principal;
use crate::error::Result;

/// Of what a request said, this much is kept.
const MAX_DETAIL_CHARS: usize = 2000;

impl App {
    pub(crate) async fn record(
        &self,
        by: &Principal,
        action: &str,
        target: &str,
        detail: Value,
    ) -> Result<()> {
        let deed = Deed {
            at: self.now(),
            token: by.owner().to_string(),
            who: by.name.clone(),
            action: action.to_string(),
            target: target.to_string(),
            detail: shortened(detail),
        };
        self.store().put_audit(deed).await?;
        Ok(())
    }
}

fn shortened(detail: Value) -> Value {
    match detail {
        Value::String(s) if s.chars().count() > MAX_DETAIL_CHARS => {
            let kept: String = s.chars().take(MAX_DETAIL_CHARS).collect();
            format!("{kept}…").into()
        }
        Value::Object(map) => map.into_iter().map(|(k, v)| (k, shortened(v))).collect(),
        other => other,
    }
}
