//! One server: its connection, and whether it is left out.
//!
//! A server that does not answer is left out. A command that comes after a rest starts a look at it in the background,
//! which brings it back when it answers: no command waits for a server that is left out.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::{ClusterConfig, Trouble};
use crate::resp::client::{Client, Reply, Url, is_silence};

/// A server rests no longer than this between two looks.
const REST_MAX: Duration = Duration::from_secs(5);

/// One server of the cluster, with its connection.
#[derive(Debug)]
pub(super) struct Member {
    url: Url,
    connection: Option<Client>,
    excluded: Option<ExcludedServer>,
}

/// A server that does not answer.
#[derive(Debug)]
struct ExcludedServer {
    rest: Duration,
    /// When the server is probed next.
    look_at: Instant,
    /// Whether it answers, from the look under way.
    look: Option<Receiver<bool>>,
}

impl ExcludedServer {
    fn new(rest: Duration) -> Self {
        Self { rest, look_at: Instant::now() + rest, look: None }
    }
}

impl Member {
    pub(super) fn new(url: Url) -> Self {
        Self { url, connection: None, excluded: None }
    }

    pub(super) fn address(&self) -> &str {
        &self.url.address
    }

    pub(super) fn is_excluded(&self) -> bool {
        self.excluded.is_some()
    }

    /// Asks the server. One that does not answer is left out until it does; meanwhile it is not asked at all.
    pub(super) fn request(&mut self, config: &ClusterConfig, command: &[&[u8]]) -> Result<Reply, Trouble> {
        if self.stays_excluded(config) {
            return Err(Trouble::Gone(format!("{} does not answer and is left out", self.url.address)));
        }
        let kept = self.connection.is_some();
        let mut answer = self.try_request(config, command);
        if kept && matches!(answer, Err(AnswerFailure::Closed(_))) {
            // The server was started again since: it gets one more chance, on a new connection.
            answer = self.try_request(config, command);
        }
        match answer {
            Ok(Reply::Error(words)) | Err(AnswerFailure::Refused(words)) => Err(Trouble::Refused(words)),
            Ok(reply) => Ok(reply),
            Err(AnswerFailure::Closed(words) | AnswerFailure::Silent(words)) => {
                self.excluded = Some(ExcludedServer::new(config.exclude));
                Err(Trouble::Gone(words))
            }
        }
    }

    /// Whether it is left out still. Starts a look at one that has rested, and hears what came of it.
    fn stays_excluded(&mut self, config: &ClusterConfig) -> bool {
        let Some(excluded) = &mut self.excluded else { return false };
        let looked = excluded.look.as_ref().map(Receiver::try_recv);
        match looked {
            Some(Ok(true)) => {
                self.excluded = None;
                return false;
            }
            Some(Ok(false) | Err(TryRecvError::Disconnected)) => {
                *excluded = ExcludedServer::new((2 * excluded.rest).min(REST_MAX));
            }
            Some(Err(TryRecvError::Empty)) => {}
            None if Instant::now() >= excluded.look_at => {
                let (url, silence, (say, hear)) = (self.url.clone(), config.silence, channel());
                let look = move || {
                    // The send fails when the client is gone.
                    let _ = say.send(answers(&url, silence));
                };
                // Where no thread can be had the other end is dropped, which counts as no answer.
                let _ = std::thread::Builder::new().name("store-look".into()).spawn(look);
                excluded.look = Some(hear);
            }
            None => {}
        }
        true
    }

    fn try_request(&mut self, config: &ClusterConfig, command: &[&[u8]]) -> Result<Reply, AnswerFailure> {
        let mut client = match self.connection.take() {
            Some(client) => client,
            None => self.watched(config)?,
        };
        client.queue(command);
        let reply = client.flush().and_then(|()| client.receive()).map_err(|e| {
            let words = format!("{}: {e}", self.url.address);
            if is_silence(&e) {
                AnswerFailure::Silent(format!("{words}; is it stopped or overloaded?"))
            } else {
                AnswerFailure::Closed(words)
            }
        })?;
        self.connection = Some(client);
        Ok(reply)
    }

    /// A connection on which a silent server is asked, on another, whether it answers anything at all.
    fn watched(&self, config: &ClusterConfig) -> Result<Client, AnswerFailure> {
        let silence = config.silence;
        let mut client = connect(&self.url, silence)?;
        let url = self.url.clone();
        client.watch(config.time_limit, move || answers(&url, silence));
        Ok(client)
    }
}

/// Half of a silence goes by before a server is asked whether it lives, and it has the other half to answer: together
/// they are what a frozen one costs.
fn connect(url: &Url, silence: Duration) -> Result<Client, AnswerFailure> {
    Client::connect(url, silence / 2).map_err(|words| {
        // An answer about a password shows that the server is alive.
        if words.starts_with("connect") || words.starts_with("call") {
            AnswerFailure::Closed(words)
        } else {
            AnswerFailure::Refused(words)
        }
    })
}

/// Whether the server answers anything, even a refusal of the login.
fn answers(url: &Url, silence: Duration) -> bool {
    match connect(url, silence) {
        Ok(mut client) => {
            client.queue(&[b"PING"]);
            client.flush().and_then(|()| client.receive()).is_ok()
        }
        Err(AnswerFailure::Refused(_)) => true,
        Err(AnswerFailure::Closed(_) | AnswerFailure::Silent(_)) => false,
    }
}

/// Why there is no answer.
enum AnswerFailure {
    /// The connection is gone, or there never was one.
    Closed(String),
    /// Nothing comes.
    Silent(String),
    /// The server does not let us in.
    Refused(String),
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const VALUE_BYTES: usize = 32 << 20;

    /// Takes a SET and sends half of a value for a GET, each with a rest in its middle that is longer than a silence.
    fn slow(mut stream: TcpStream, rest: Duration) -> std::io::Result<()> {
        let mut first = [0; 1];
        stream.read_exact(&mut first)?;
        std::thread::sleep(rest);
        let mut left = vec![0; b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$33554432\r\n\r\n".len() - 1 + VALUE_BYTES];
        stream.read_exact(&mut left)?;
        stream.write_all(b"+OK\r\n")?;
        let mut get = [0; b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n".len()];
        stream.read_exact(&mut get)?;
        stream.write_all(b"$4\r\nva")?;
        std::thread::sleep(rest);
        stream.write_all(b"lu\r\n")
    }

    fn request(answers_pings: bool, rest: Duration) -> [Result<Reply, Trouble>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("redis://{}", listener.local_addr().expect("bound"));
        std::thread::spawn(move || {
            let mut met = listener.incoming().map_while(Result::ok);
            let first = met.next().expect("the member connects");
            std::thread::spawn(move || slow(first, rest));
            let mut kept = Vec::new();
            for mut ping in met {
                if answers_pings {
                    ping.write_all(b"+PONG\r\n").expect("it listens");
                }
                kept.push(ping);
            }
        });
        let config = ClusterConfig::of(&url).expect("one server");
        let mut member = Member::new(config.servers[0].clone());
        let put = member.request(&config, &[b"SET", b"a", &vec![7; VALUE_BYTES]]);
        [put, member.request(&config, &[b"GET", b"a"])]
    }

    #[test]
    fn a_server_that_rests_in_the_middle_is_waited_for_while_it_answers_pings() {
        let [put, got] = request(true, Duration::from_millis(1_200));
        assert_eq!((put, got), (Ok(Reply::Simple("OK".into())), Ok(Reply::Bulk(b"valu".to_vec()))));
    }

    #[test]
    fn one_that_does_not_is_left_out() {
        let [put, got] = request(false, Duration::from_secs(20));
        assert!(
            matches!(&put, Err(Trouble::Gone(words)) if words.contains("stopped or overloaded")),
            "{put:?}"
        );
        assert!(matches!(&got, Err(Trouble::Gone(words)) if words.contains("left out")), "{got:?}");
    }

    /// Answers every PING and GET while `frozen` is not set, and nothing while it is.
    fn freezing(mut stream: TcpStream, frozen: &AtomicBool) {
        let mut heard = [0; 256];
        while let Ok(some @ 1..) = stream.read(&mut heard) {
            while frozen.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let reply: &[u8] =
                if heard[..some].windows(3).any(|w| w == b"GET") { b"$-1\r\n" } else { b"+PONG\r\n" };
            if stream.write_all(reply).is_err() {
                return;
            }
        }
    }

    #[test]
    fn a_frozen_server_costs_a_silence_once_and_is_back_when_it_answers() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("redis://{}", listener.local_addr().expect("bound"));
        let frozen = Arc::new(AtomicBool::new(false));
        std::thread::spawn({
            let frozen = frozen.clone();
            move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    let frozen = frozen.clone();
                    std::thread::spawn(move || freezing(stream, &frozen));
                }
            }
        });
        let config =
            ClusterConfig { exclude: Duration::from_millis(50), ..ClusterConfig::of(&url).expect("one") };
        let mut member = Member::new(config.servers[0].clone());
        let get = |member: &mut Member| {
            let begun = Instant::now();
            let answer = member.request(&config, &[b"GET", b"a"]);
            (answer.is_ok(), begun.elapsed())
        };
        assert!(get(&mut member).0);
        frozen.store(true, Ordering::SeqCst);
        let (start, mut costly) = (Instant::now(), Vec::new());
        while start.elapsed() < 5 * config.silence {
            let (answered, cost) = get(&mut member);
            assert!(!answered && member.is_excluded());
            costly.extend(Some(cost).filter(|cost| *cost >= config.silence / 2));
        }
        assert_eq!(costly.len(), 1, "looks at it cost nobody anything: {costly:?}");
        frozen.store(false, Ordering::SeqCst);
        let start = Instant::now();
        while !get(&mut member).0 {
            assert!(start.elapsed() < Duration::from_secs(60), "it answers again");
        }
    }
}
