//! A bucket by its address.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore as Bucket, RetryConfig};

use super::http::Connector;
use super::{ColdBucket, ColdConfig};

/// The bucket, and the prefix of every name in it. Nothing is asked of it yet. Over HTTP it may say no more at a time
/// than `answer_max_bytes`.
pub(super) fn open(config: &ColdConfig, answer_max_bytes: usize) -> Result<(Arc<dyn Bucket>, Path), String> {
    let url = match &config.bucket {
        ColdBucket::Url(url) => url,
        ColdBucket::Given(bucket) => return Ok((Arc::clone(bucket), Path::default())),
    };
    let wrong =
        |why: String| format!("cold: {url}: {why}; give s3://bucket/prefix, file:///folder or memory:");
    if url == "memory:" {
        return Ok((Arc::new(InMemory::new()), Path::default()));
    }
    if let Some(folder) = url.strip_prefix("file://") {
        if !folder.starts_with('/') {
            return Err(wrong("the folder is not given from the root".into()));
        }
        std::fs::create_dir_all(folder).map_err(|e| wrong(e.to_string()))?;
        let folder = LocalFileSystem::new_with_prefix(folder).map_err(|e| wrong(e.to_string()))?;
        return Ok((Arc::new(folder.with_fsync(true)), Path::default()));
    }
    let rest = url.strip_prefix("s3://").ok_or_else(|| wrong("no such kind of bucket".into()))?;
    let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if name.is_empty() {
        return Err(wrong("the bucket has no name".into()));
    }
    let prefix = Path::parse(prefix.trim_end_matches('/')).map_err(|e| wrong(e.to_string()))?;
    let bucket = s3(config, name, answer_max_bytes).map_err(|e| wrong(e.to_string()))?;
    Ok((bucket, prefix))
}

/// Keys and region come from the usual `AWS_` variables.
fn s3(config: &ColdConfig, name: &str, answer_max_bytes: usize) -> object_store::Result<Arc<dyn Bucket>> {
    let retry = RetryConfig {
        max_retries: 1,
        retry_timeout: config.patience.max(Duration::from_millis(1)),
        ..RetryConfig::default()
    };
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(name)
        // One at a time, as every service of this kind knows it.
        .with_disable_bulk_delete(true)
        .with_http_connector(Connector { answer_max_bytes })
        .with_retry(retry);
    let named = || std::env::var("AWS_ENDPOINT_URL").or_else(|_| std::env::var("AWS_ENDPOINT")).ok();
    let endpoint = config.endpoint.clone().or_else(named);
    if let Some(endpoint) = endpoint {
        // A server of one's own is often reached without TLS; its address says so.
        builder = builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint);
    }
    Ok(Arc::new(builder.build()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_wrong_ones_named() {
        let read = |url: &str| open(&ColdConfig::new(ColdBucket::Url(url.into())), 1 << 20);
        assert!(read("memory:").is_ok());
        let folder = tempfile::tempdir().unwrap();
        assert!(read(&format!("file://{}/new", folder.path().display())).is_ok());
        assert_eq!(read("s3://bucket/a/b/").unwrap().1, Path::from("a/b"));
        for bad in ["s3://", "gs://bucket", "bucket", "file://folder", ""] {
            let why = read(bad).map(|_| ()).unwrap_err();
            assert!(why.contains("s3://bucket/prefix"), "{why}");
        }
    }
}
