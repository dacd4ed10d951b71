//! Looks at a service, by its status, figures and settings.

use std::time::Instant;

use anyhow::Result;

use super::scrape::Scrape;
use super::{Objectives, Sample};
use crate::conductor::Status;
use crate::operator::OperatorClient;

impl Sample {
    /// One look.
    ///
    /// # Errors
    /// In words: nothing answers, or not as a service of this version does.
    pub(super) async fn of(client: &OperatorClient) -> Result<Self> {
        client
            .within(async {
                let body = client.get("/admin/status").await?.body;
                let status: Status =
                    serde_json::from_slice(&body).map_err(|e| client.version_mismatch(&e))?;
                let metrics = client.get("/metrics").await?.body;
                let config = client.get("/admin/config").await?.body;
                let config = serde_json::from_slice(&config).map_err(|e| client.version_mismatch(&e))?;
                let scrape = Scrape::read(&String::from_utf8_lossy(&metrics));
                Ok(Self { at: Instant::now(), status, scrape, objectives: objectives(&config) })
            })
            .await
    }
}

/// The objectives of the classes, if all of them promise the same.
fn objectives(config: &serde_json::Value) -> Option<Objectives> {
    let classes = config.pointer("/scheduler/classes")?.as_array()?;
    let mut promises = classes.iter().map(|class| {
        let seconds = |name: &str| Some(class.get(name)?.as_u64()? as f64 / 1e6);
        Some(Objectives { ttft_s: seconds("ttft_us")?, tbt_s: seconds("tbt_us")? })
    });
    let first = promises.next()??;
    promises.all(|other| other == Some(first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_objective_is_known_only_if_all_classes_share_it() {
        let class = |ttft: u64| json!({"ttft_us": ttft, "tbt_us": 100_000});
        let of = |list: &[serde_json::Value]| objectives(&json!({"scheduler": {"classes": list}}));
        let one = Some(Objectives { ttft_s: 30.0, tbt_s: 0.1 });
        assert_eq!(of(&[class(30_000_000)]), one);
        assert_eq!(of(&[class(30_000_000), class(30_000_000)]), one);
        assert_eq!(of(&[class(30_000_000), class(1)]), None);
        assert_eq!((of(&[]), objectives(&json!({}))), (None, None));
    }
}
