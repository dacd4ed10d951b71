//! Puts and gets over a socket: a server on a thread of its own, one client, one value or a batch at a time.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{Effort, Figure, elapsed_ns, percentile_us};
use crate::resp::client::{Client, Reply, Url};
use crate::resp::{RespConfig, Server};
use crate::{Clock, ObjectStore, StoreConfig};

const BATCH: usize = 128;
const NAMES: usize = 1024;
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// A server that ends with this.
struct SocketServer {
    address: String,
    /// The kernel's file with its thread's processor time.
    times: PathBuf,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl SocketServer {
    fn start(effort: Effort) -> Result<Self, String> {
        let config = StoreConfig {
            capacity_bytes: effort.memory_bytes,
            value_max_bytes: 1 << 20,
            ..StoreConfig::default()
        };
        let store = ObjectStore::new(&config, Clock::machine())?;
        let server = Server::new(store, RespConfig::default())?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (report, reports) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                let Ok(listener) = tokio::net::TcpListener::bind("127.0.0.1:0").await else { return };
                let Ok(address) = listener.local_addr() else { return };
                let own = std::fs::read_link("/proc/thread-self").unwrap_or_default();
                if report
                    .send((address.to_string(), PathBuf::from("/proc").join(own).join("schedstat")))
                    .is_ok()
                {
                    server.serve(listener, async { drop(stopped.await) }).await;
                }
            });
        });
        let (address, times) = reports.recv().map_err(|_| "bench: the server did not start".to_owned())?;
        Ok(Self { address, times, stop: Some(stop), thread: Some(thread) })
    }

    fn client(&self) -> Result<Client, String> {
        Client::connect(&format!("redis://{}", self.address).parse::<Url>()?, TIME_LIMIT)
    }

    /// Processor time of the server so far, µs.
    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    fn cpu_us(&self) -> f64 {
        let text = std::fs::read_to_string(&self.times).unwrap_or_default();
        let ns: u64 = text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        ns as f64 / 1_000.0
    }
}

impl Drop for SocketServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It ends by the message above; what it says is of no use here.
            let _ = thread.join();
        }
    }
}

/// Single values of 4 and 64 KiB, then batches of 128 values of 4 KiB.
///
/// # Errors
/// The error of the network or the server.
pub fn socket(effort: Effort, report: &mut dyn FnMut(&str)) -> Result<Vec<Figure>, String> {
    let served = SocketServer::start(effort)?;
    let mut client = served.client()?;
    let mut figures = Vec::new();
    for (bytes, put_bar, get_bar) in [(4 << 10, Some(70.0), Some(45.0)), (64 << 10, None, None)] {
        let value = vec![5; bytes];
        for (what, bar) in [("put", put_bar), ("get", get_bar)] {
            report(&format!("socket: {what} {} KiB", bytes >> 10));
            figures.extend(singles(effort, &served, &mut client, &value, (what, bar))?);
        }
    }
    let value = vec![6; 4 << 10];
    for (what, bar) in [("put", 34_000.0), ("get", 39_000.0)] {
        report(&format!("socket: {what} in batches"));
        figures.extend(batches(effort, &served, &mut client, &value, (what, bar))?);
    }
    Ok(figures)
}

fn name_of(number: usize) -> String {
    format!("bench@0@{:032}", number % NAMES)
}

#[expect(clippy::cast_precision_loss, reason = "figures for a report")]
fn singles(
    effort: Effort,
    served: &SocketServer,
    client: &mut Client,
    value: &[u8],
    (what, bar): (&str, Option<f64>),
) -> Result<Vec<Figure>, String> {
    let (start, before, mut samples) = (Instant::now(), served.cpu_us(), Vec::new());
    while start.elapsed() < effort.each || samples.len() < NAMES {
        let name = name_of(samples.len());
        let begun = Instant::now();
        let reply = match what {
            "put" => client.call(&[b"SET", name.as_bytes(), value])?,
            _ => client.call(&[b"GET", name.as_bytes()])?,
        };
        samples.push(elapsed_ns(begun));
        expect(&reply, what, value)?;
    }
    let cpu = (served.cpu_us() - before) / samples.len() as f64;
    let label = |rest: &str| format!("socket {what} {} KiB {rest}", value.len() >> 10);
    let p50 = Figure::new(label("p50"), "us", percentile_us(&mut samples, 500));
    let p50 = if let Some(bar) = bar { p50.most(bar) } else { p50 };
    let p99 = Figure::new(label("p99"), "us", percentile_us(&mut samples, 990));
    Ok(vec![p50, p99, Figure::new(label("server CPU"), "us", cpu)])
}

#[expect(clippy::cast_precision_loss, reason = "figures for a report")]
fn batches(
    effort: Effort,
    served: &SocketServer,
    client: &mut Client,
    value: &[u8],
    (what, bar): (&str, f64),
) -> Result<Vec<Figure>, String> {
    let (start, before, mut done) = (Instant::now(), served.cpu_us(), 0);
    while start.elapsed() < effort.each || done < NAMES {
        let names: Vec<String> = (done..done + BATCH).map(name_of).collect();
        let mut command: Vec<&[u8]> = vec![if what == "put" { b"MSET" } else { b"MGET" }];
        for name in &names {
            command.push(name.as_bytes());
            if what == "put" {
                command.push(value);
            }
        }
        match client.call(&command)? {
            Reply::List(replies) => replies.iter().try_for_each(|reply| expect(reply, what, value))?,
            reply => expect(&reply, what, value)?,
        }
        done += BATCH;
    }
    let rate = done as f64 / start.elapsed().as_secs_f64();
    let cpu = (served.cpu_us() - before) / done as f64;
    let label = |rest: &str| format!("socket {what} 4 KiB, 128 at a time, {rest}");
    Ok(vec![Figure::new(label("rate"), "1/s", rate).least(bar), Figure::new(label("server CPU"), "us", cpu)])
}

fn expect(reply: &Reply, what: &str, value: &[u8]) -> Result<(), String> {
    match reply {
        Reply::Simple(_) if what == "put" => Ok(()),
        Reply::Bulk(got) if got.len() == value.len() && got[0] == value[0] => Ok(()),
        _ => Err(format!("bench: {what} was answered by something else")),
    }
}
