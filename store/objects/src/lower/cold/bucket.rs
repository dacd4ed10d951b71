//! A bucket by its address.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore as Bucket, RetryConfig};

use super::http::Connector;
use super::variables::{Variables, is_address};
use super::{ColdBucket, ColdConfig};

/// Why there is no bucket.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BucketError {
    /// Its address, or a variable, cannot be right.
    Setting(String),
    /// It cannot be used now, though its address may be right: a folder on a disk that is read-only or full, say.
    Unusable(String),
}

impl From<String> for BucketError {
    fn from(why: String) -> Self {
        Self::Setting(why)
    }
}

/// The bucket, and the prefix of every name in it. Sends no request yet. An HTTP answer is at most `answer_max_bytes`
/// long.
pub(super) fn open(
    config: &ColdConfig,
    answer_max_bytes: usize,
) -> Result<(Arc<dyn Bucket>, Path), BucketError> {
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
            return Err(wrong("the folder is not given from the root".into()).into());
        }
        let unusable = |why: String| BucketError::Unusable(format!("make the folder: {why}"));
        std::fs::create_dir_all(folder).map_err(|e| unusable(e.to_string()))?;
        let folder = LocalFileSystem::new_with_prefix(folder).map_err(|e| unusable(e.to_string()))?;
        return Ok((Arc::new(folder.with_fsync(true)), Path::default()));
    }
    let rest = url.strip_prefix("s3://").ok_or_else(|| wrong("no such kind of bucket".into()))?;
    let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if name.is_empty() {
        return Err(wrong("the bucket has no name".into()).into());
    }
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c)) {
        return Err(wrong(format!("{name:?} is no name of a bucket")).into());
    }
    let prefix = Path::parse(prefix.trim_end_matches('/')).map_err(|e| wrong(e.to_string()))?;
    let variables = Variables::read(std::env::vars_os())?;
    let endpoint = endpoint(config, |name| variables.get(name))?;
    let s3 = s3(config, (name, endpoint), &variables, answer_max_bytes);
    let bucket = s3.map_err(|e| format!("cold: {url}: {e}"))?;
    Ok((bucket, prefix))
}

/// Where the service is, if that is said: a request to what is no address would end the thread that sends it.
fn endpoint(
    config: &ColdConfig,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<String>, String> {
    let named = || ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"].into_iter().find_map(variable);
    let Some(endpoint) = config.endpoint.clone().or_else(named) else { return Ok(None) };
    if is_address(&endpoint) {
        return Ok(Some(endpoint));
    }
    Err(format!("cold: the endpoint {endpoint:?} is no address; give one like http://127.0.0.1:9000"))
}

/// Keys and region come from the usual `AWS_` variables.
fn s3(
    config: &ColdConfig,
    (name, endpoint): (&str, Option<String>),
    variables: &Variables,
    answer_max_bytes: usize,
) -> object_store::Result<Arc<dyn Bucket>> {
    let retry = RetryConfig {
        max_retries: 1,
        retry_timeout: config.time_limit.max(Duration::from_millis(1)),
        ..RetryConfig::default()
    };
    let builder = variables
        .settings()
        .fold(AmazonS3Builder::new(), |builder, (setting, value)| builder.with_config(setting, value));
    let mut builder = builder
        .with_bucket_name(name)
        // One at a time, as every service of this kind knows it.
        .with_disable_bulk_delete(true)
        .with_http_connector(Connector { answer_max_bytes })
        .with_retry(retry);
    if let Some(endpoint) = endpoint {
        // A server of one's own is often reached without TLS; its address says so.
        builder = builder.with_allow_http(endpoint.starts_with("http://"));
        // By this name it goes before what any variable says.
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
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
        for bad in ["s3://", "s3://a b/c", "gs://bucket", "bucket", "file://folder", ""] {
            let Err(BucketError::Setting(why)) = read(bad) else { panic!("{bad} is no address") };
            assert!(why.contains("s3://bucket/prefix"), "{why}");
        }
        // Root may write where modes forbid it, so the folder's place is taken by a file.
        let taken = folder.path().join("taken");
        std::fs::write(&taken, "").unwrap();
        let Err(BucketError::Unusable(why)) = read(&format!("file://{}/a", taken.display())) else {
            panic!("a folder inside a file")
        };
        assert!(why.starts_with("make the folder: "), "{why}");
    }

    #[test]
    fn an_endpoint_that_is_no_address_is_refused_before_anything_is_sent() {
        let read = |endpoint: &str| {
            let config = ColdConfig::new(ColdBucket::Url("s3://bucket".into()));
            open(&ColdConfig { endpoint: Some(endpoint.into()), ..config }, 1 << 20).map(|_| ())
        };
        assert_eq!((read("http://127.0.0.1:9000"), read("https://minio/path")), (Ok(()), Ok(())));
        for bad in ["nonsense", "", "127.0.0.1:9000", "ftp://minio", "http://", "http://a b"] {
            let Err(BucketError::Setting(why)) = read(bad) else { panic!("{bad} is no address") };
            assert!(why.contains("give one like http://127.0.0.1:9000"), "{bad}: {why}");
        }
    }

    #[test]
    fn what_was_asked_for_goes_before_the_variables_and_the_nearest_of_them_first() {
        let mut config = ColdConfig::new(ColdBucket::Url("s3://bucket".into()));
        let said = |config: &ColdConfig, names: &[&str]| {
            let variable = |name: &str| names.contains(&name).then(|| format!("http://{name}"));
            endpoint(config, variable).unwrap()
        };
        assert_eq!(said(&config, &[]), None);
        assert_eq!(said(&config, &["AWS_ENDPOINT"]).unwrap(), "http://AWS_ENDPOINT");
        let both = ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"];
        assert_eq!(said(&config, &both).unwrap(), "http://AWS_ENDPOINT_URL_S3");
        config.endpoint = Some("http://127.0.0.1:1".into());
        assert_eq!(said(&config, &both).unwrap(), "http://127.0.0.1:1");
        assert!(endpoint(&ColdConfig { endpoint: None, ..config }, |_| Some("nonsense".into())).is_err());
    }
}
