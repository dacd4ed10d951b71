//! The endpoints of a Kubernetes service, as its EndpointSlices list them.

mod http;
mod slices;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use self::http::{Api, Lines};
use self::slices::{Happened, Slices};
use super::FollowFuture;
use crate::backoff::Backoff;
use crate::directory::Board;
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::member::MemberRole;

/// Where a pod finds how to speak to its cluster.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Slices that one answer brings.
const PAGE: usize = 100;
/// Pages that one listing may have: far more slices than [`slices::SLICES_MAX`].
const PAGES_MAX: usize = 64;

/// A service of a Kubernetes cluster. Its ready endpoints are the members, each named after its pod; the service's
/// label `baton.dev/role` says what they do.
#[derive(Clone, Debug)]
pub struct KubernetesSource {
    /// The API server, `https://HOST:PORT`.
    pub server: String,
    /// The service's namespace.
    pub namespace: String,
    /// The service's name.
    pub service: String,
    /// Which of its ports, by name; none: the first.
    pub port: Option<String>,
    /// The role of members where the service has no such label.
    pub role: MemberRole,
    /// File with the token to show; read for every request, since it is renewed there.
    pub token: Option<PathBuf>,
    /// File with the certificates to trust, PEM.
    pub ca: Option<PathBuf>,
    /// How long the server may keep one watch; it falls silent no longer than this and a quarter.
    pub watch_s: u32,
}

impl KubernetesSource {
    /// `service` in this pod's own namespace, with this pod's own account.
    ///
    /// # Errors
    /// When this is no pod.
    pub fn in_cluster(service: impl Into<String>, role: MemberRole) -> Result<Self> {
        let host = std::env::var("KUBERNETES_SERVICE_HOST").ok();
        let port = std::env::var("KUBERNETES_SERVICE_PORT").ok();
        Self::from_account(Path::new(ACCOUNT), host.zip(port), service.into(), role)
    }

    fn from_account(
        account: &Path,
        server: Option<(String, String)>,
        service: String,
        role: MemberRole,
    ) -> Result<Self> {
        let Some((host, port)) = server else {
            return Err(MembershipError::invalid(
                "KUBERNETES_SERVICE_HOST and _PORT are not set: this is no pod; give the API server's address",
            ));
        };
        let file = account.join("namespace");
        let namespace = std::fs::read_to_string(&file).map_err(|e| {
            let text = format!("{}: {e}; mount the pod's service account token", file.display());
            MembershipError::invalid(text)
        })?;
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Ok(Self {
            server: format!("https://{host}:{port}"),
            namespace: namespace.trim().to_owned(),
            service,
            port: None,
            role,
            token: Some(account.join("token")),
            ca: Some(account.join("ca.crt")),
            watch_s: 60,
        })
    }

    pub(super) fn following(self, board: Board, stop: CancellationToken) -> Result<FollowFuture> {
        for (what, name) in [("namespace", &self.namespace), ("service", &self.service)] {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
            if name.is_empty() || name.len() > 253 || !name.chars().all(plain) {
                return Err(MembershipError::invalid(format!("'{name}' is no name of a {what}; check it")));
            }
        }
        if self.watch_s == 0 {
            return Err(MembershipError::invalid("a watch of 0 s tells nothing; give some seconds"));
        }
        let api = Api::new(&self.server, self.token.clone(), self.ca.as_deref())?;
        Ok(Box::pin(self.follow(api, board, stop)))
    }

    async fn follow(self, api: Api, board: Board, stop: CancellationToken) {
        let mut backoff = Backoff::new(&self.service);
        let mut slices = Slices::new(self.port.clone(), self.role);
        loop {
            let ended = tokio::select! {
                ended = self.once(&api, &mut slices, &board, &mut backoff) => ended,
                () = stop.cancelled() => return,
            };
            match ended {
                // The server ends each watch in time: that is no fault.
                Ok(()) => continue,
                Err(error) if error.kind == Kind::Compacted => slices.forget_revision(),
                Err(error) => board.stale(&error.to_string()),
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.pause()) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Lists if need be, and follows one watch to its end.
    async fn once(&self, api: &Api, slices: &mut Slices, board: &Board, backoff: &mut Backoff) -> Result<()> {
        if slices.revision().is_none() {
            self.list(api, slices).await?;
            slices.write(board);
        }
        let silence = Duration::from_secs(u64::from(self.watch_s)) * 5 / 4;
        let revision = slices.revision().unwrap_or_default();
        let query = format!(
            "&watch=1&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={}",
            encoded(revision),
            self.watch_s
        );
        let mut lines: Lines = api.watch(&self.path(&query)).await?;
        board.fresh();
        loop {
            let line = tokio::time::timeout(silence, lines.next()).await.map_err(|_| {
                let text = format!("Kubernetes at {}: the watch has fallen silent; watch anew", self.server);
                MembershipError::new(Kind::TimedOut, Stage::Watch, text)
            })??;
            let Some(line) = line else { return Ok(()) };
            if slices.happened(&line)? == Happened::Change {
                slices.write(board);
            }
            backoff.worked();
        }
    }

    async fn list(&self, api: &Api, slices: &mut Slices) -> Result<()> {
        let mut listing = slices.begin();
        let mut further = String::new();
        for _ in 0..PAGES_MAX {
            let page = api.get(&self.path(&format!("&limit={PAGE}{further}"))).await?;
            match listing.page(&page)? {
                None => {
                    slices.finish(listing);
                    return Ok(());
                }
                Some(token) => further = format!("&continue={}", encoded(&token)),
            }
        }
        let text = format!("service '{}' has more than {} slices; split it", self.service, PAGES_MAX * PAGE);
        Err(MembershipError::new(Kind::Invalid, Stage::Read, text))
    }

    fn path(&self, query: &str) -> String {
        format!(
            "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3D{}{query}",
            self.namespace, self.service
        )
    }
}

/// `text` as part of a query.
fn encoded(text: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            out.push(char::from(byte));
        } else {
            write!(out, "%{byte:02X}").expect("a string takes everything");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_knows_its_cluster_from_its_account() {
        let account = tempfile::tempdir().expect("a directory");
        let server = || Some(("fd00::1".to_owned(), "443".to_owned()));
        let source =
            |server| KubernetesSource::from_account(account.path(), server, "nodes".into(), MemberRole::Both);
        assert!(source(server()).is_err_and(|e| e.text.contains("service account token")));
        std::fs::write(account.path().join("namespace"), "serving\n").expect("written");
        let known = source(server()).expect("a pod");
        assert_eq!((known.server.as_str(), known.namespace.as_str()), ("https://[fd00::1]:443", "serving"));
        assert!(known.path("&limit=1").ends_with(
            "/namespaces/serving/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dnodes&limit=1"
        ));
        assert!(source(None).is_err_and(|e| e.text.contains("this is no pod")));
    }

    #[test]
    fn names_and_queries_are_checked_and_encoded() {
        assert_eq!(encoded("a b/=+~é"), "a%20b%2F%3D%2B~%C3%A9");
        let source = |service: &str| KubernetesSource {
            server: "http://127.0.0.1:1".into(),
            namespace: "n".into(),
            service: service.into(),
            port: None,
            role: MemberRole::Both,
            token: None,
            ca: None,
            watch_s: 1,
        };
        let start =
            |source: KubernetesSource| source.following(Board::new().0, CancellationToken::new()).err();
        assert!(start(source("a/b")).is_some_and(|e| e.text.contains("'a/b' is no name of a service")));
        assert!(start(KubernetesSource { watch_s: 0, ..source("a") }).is_some());
        assert!(start(source("a")).is_none());
    }
}
