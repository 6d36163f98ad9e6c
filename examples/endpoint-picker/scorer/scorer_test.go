package scorer

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/datalayer"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/plugin"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/scheduling"
)

var nodes = map[string]string{"engine-a": "node-a", "engine-b": "node-b", "engine-c": "node-c"}

func endpoint(pod string) scheduling.Endpoint {
	return scheduling.NewEndpoint(&datalayer.EndpointMetadata{
		NamespacedName: types.NamespacedName{Namespace: "team-a", Name: pod + "-rank-0"}, PodName: pod,
	}, nil, nil)
}

func request(tokens int) *scheduling.LLMRequest {
	ids := make([]uint32, tokens)
	for n := range ids {
		ids[n] = uint32(n * 31)
	}
	return &scheduling.LLMRequest{TargetModel: "m", TokenizedPrompt: &scheduling.TokenizedPrompt{TokenIDs: ids}}
}

func parameters(t *testing.T, url string) Parameters {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return Parameters{
		URL: url, TokenFile: file, Tenant: "team-a", Fingerprint: strings.Repeat("ab", 32), BlockTokens: 4,
		ChunkTokens: 8, Timeout: "500ms",
	}
}

func scorerOf(t *testing.T, p Parameters) *Scorer {
	t.Helper()
	made, err := New("one", p, func(pod string) string { return nodes[pod] })
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// scores by pod.
func scores(s *Scorer, asked *scheduling.LLMRequest, pods ...string) map[string]float64 {
	endpoints := make([]scheduling.Endpoint, len(pods))
	for n, pod := range pods {
		endpoints[n] = endpoint(pod)
	}
	found := map[string]float64{}
	for one, score := range s.Score(context.Background(), nil, asked, endpoints) {
		found[one.GetMetadata().PodName] = score
	}
	return found
}

func answering(t *testing.T, text string, asked chan<- question) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body question
		if r.Header.Get("Authorization") != "Bearer secret" || json.NewDecoder(r.Body).Decode(&body) != nil {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if asked != nil {
			asked <- body
		}
		_, _ = io.WriteString(w, text)
	}))
	t.Cleanup(server.Close)
	return server
}

func TestHashesAreThoseOfVLLM(t *testing.T) {
	// computed by vLLM's sha256_cbor (cbor2, canonical) with PYTHONHASHSEED=0
	tokens := []uint32{0, 23, 24, 255, 256, 65535, 65536, 151643, 7}
	want := []string{
		"ca90027d467f8ae0c02e71aa4eff29f116d1b74ca16446a60ab640f53e976f43",
		"b775930c5f218a58b3ade796ea4a666b7f17e605c19c6315b0f1d34c7c49a4a2",
	}
	found := blockHashes(tokens, 4, "0", 100)
	if len(found) != len(want) {
		t.Fatalf("%d hashes", len(found))
	}
	for n, hash := range found {
		if hex.EncodeToString(hash[:]) != want[n] {
			t.Errorf("hash %d is %x", n, hash)
		}
	}
	if len(blockHashes(tokens, 4, "0", 1)) != 1 {
		t.Error("the number of hashes is not bounded")
	}
}

func TestEndpointsAreScoredByTheirNodeThenPeersThenTheSharedTier(t *testing.T) {
	asked := make(chan question, 1)
	server := answering(t, `{"nodes": {"node-a": 4, "node-b": 1}, "shared": 8, "complete": true}`, asked)
	found := scores(scorerOf(t, parameters(t, server.URL)), request(8*8+5), "engine-a", "engine-b", "engine-c", "unknown")
	// of 8 chunks: 4 there and 4 shared; 1 there, 3 of a peer and 4 shared; 4 of a peer and 4 shared
	want := map[string]float64{"engine-a": (4 + 1) / 8.0, "engine-b": (1 + 1.5 + 1) / 8, "engine-c": 3 / 8.0, "unknown": 3 / 8.0}
	for pod, score := range want {
		if found[pod] != score {
			t.Errorf("%s has %v, not %v", pod, found[pod], score)
		}
	}
	one := <-asked
	hashes := blockHashes(request(69).TokenizedPrompt.TokenIDs, 4, "0", 100)
	if len(one.Hashes) != 8 || one.Hashes[7] != hex.EncodeToString(hashes[15][:]) || one.Tenant != "team-a" {
		t.Errorf("the pool was asked %+v", one)
	}
}

func TestAPromptWhoseHashesDependOnMoreThanTokensIsNotAsked(t *testing.T) {
	asked := make(chan question, 8)
	p := parameters(t, answering(t, `{"nodes": {"node-a": 8}}`, asked).URL)
	p.Models = []string{"m"}
	s := scorerOf(t, p)
	image, adapter, salted, short, raw := request(64), request(64), request(64), request(7), request(64)
	image.TokenizedPrompt.MultiModalFeatures = []scheduling.MultiModalFeature{{Hash: "h"}}
	adapter.TargetModel = "adapter"
	salted.Body = &scheduling.LLMRequestBody{Completions: &scheduling.CompletionsRequest{CacheSalt: "s"}}
	raw.TokenizedPrompt = nil
	for n, one := range []*scheduling.LLMRequest{image, adapter, salted, short, raw, nil} {
		if found := scores(s, one, "engine-a"); found["engine-a"] != 0 || len(found) != 1 {
			t.Errorf("request %d: %v", n, found)
		}
	}
	if len(asked) != 0 {
		t.Errorf("the pool was asked %d times", len(asked))
	}
	if found := scores(s, request(64), "engine-a"); found["engine-a"] != 1 {
		t.Errorf("a request of tokens alone has %v", found)
	}
}

// Faults: each gives score 0 within the deadline, and the pool is then left alone for a while.
func TestAPoolThatDoesNotAnswerMeansScoreZeroInTime(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	release := make(chan struct{})
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		_, _ = io.WriteString(w, `{"nodes": {"node-a": `)
		w.(http.Flusher).Flush()
		<-release
	}))
	defer slow.Close()
	defer close(release)
	statusOnly := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }))
	defer statusOnly.Close()
	for name, address := range map[string]string{
		"silent": "http://" + silent.Addr().String(), "closed": "http://" + closed.Addr().String(), "slow": slow.URL,
		"error": statusOnly.URL, "no JSON": answering(t, "nodes", nil).URL,
		"endless": answering(t, `{"nodes": {"`+strings.Repeat("x", 2*maxAnswer)+`": 1}}`, nil).URL,
	} {
		t.Run(name, func(t *testing.T) {
			p := parameters(t, address)
			p.Timeout, p.Pause = "20ms", "1h"
			s := scorerOf(t, p)
			done := make(chan map[string]float64)
			go func() { done <- scores(s, request(64), "engine-a") }()
			select {
			case found := <-done:
				if found["engine-a"] != 0 || len(found) != 1 {
					t.Errorf("scores are %v", found)
				}
			case <-time.After(10 * time.Second): // 500 times the deadline: the machine may be busy
				t.Fatal("the scorer waits for the pool")
			}
			if _, err := s.pool.ask(context.Background(), question{}); err != errBusy {
				t.Errorf("the pool is asked again: %v", err)
			}
		})
	}
}

func TestAPoolThatRecoversIsAskedAgain(t *testing.T) {
	var isUp atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !isUp.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, `{"nodes": {"node-a": 8}}`)
	}))
	defer server.Close()
	p := parameters(t, server.URL)
	p.Pause = "1ms"
	s := scorerOf(t, p)
	scores(s, request(64), "engine-a")
	isUp.Store(true)
	for deadline := time.Now().Add(10 * time.Second); scores(s, request(64), "engine-a")["engine-a"] != 1; {
		if time.Now().After(deadline) {
			t.Fatal("the pool is not asked again")
		}
		time.Sleep(time.Millisecond)
	}
}

func TestTheTokenIsNotSentElsewhere(t *testing.T) {
	var seen atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { seen.Add(1) }))
	defer other.Close()
	server := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer server.Close()
	if found := scores(scorerOf(t, parameters(t, server.URL)), request(64), "engine-a"); found["engine-a"] != 0 {
		t.Errorf("scores are %v", found)
	}
	if seen.Load() != 0 {
		t.Error("the scorer followed a redirect")
	}
}

func TestQueriesAtTheSameTimeAreBounded(t *testing.T) {
	s := scorerOf(t, parameters(t, "http://127.0.0.1:1"))
	for range inFlight {
		s.pool.places <- struct{}{}
	}
	if _, err := s.pool.ask(context.Background(), question{}); err != errBusy {
		t.Errorf("one more query: %v", err)
	}
}

func TestWrongParametersAreRefused(t *testing.T) {
	two := 2.0
	for name, change := range map[string]func(*Parameters){
		"fingerprint": func(p *Parameters) { p.Fingerprint = "ab" },
		"chunks":      func(p *Parameters) { p.ChunkTokens = 7 },
		"blocks":      func(p *Parameters) { p.BlockTokens = -1 },
		"url":         func(p *Parameters) { p.URL = "sidecar" },
		"tenant":      func(p *Parameters) { p.Tenant = "" },
		"timeout":     func(p *Parameters) { p.Timeout = "soon" },
		"pause":       func(p *Parameters) { p.Pause = "-1s" },
		"weight":      func(p *Parameters) { p.Peer = &two },
	} {
		p := parameters(t, "http://127.0.0.1:1")
		change(&p)
		if _, err := New("one", p, nil); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestThePickerFindsThePlugin(t *testing.T) {
	Register()
	factory, isKnown := plugin.Registry[Type]
	if !isKnown {
		t.Fatal("the plug-in is not registered")
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	raw, _ := json.Marshal(parameters(t, "http://127.0.0.1:1"))
	if _, err := factory("one", raw, nil); err == nil || !strings.Contains(err.Error(), "cluster") {
		t.Errorf("outside of a cluster: %v", err)
	}
	s := scorerOf(t, parameters(t, "http://127.0.0.1:1"))
	if s.TypedName() != (plugin.TypedName{Type: Type, Name: "one"}) || s.Category() != scheduling.Affinity {
		t.Error("the plug-in has another name or category")
	}
}

func TestNodesOfPodsComeFromTheAPIServerAndStayAfterAFailure(t *testing.T) {
	var isDown atomic.Bool
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isDown.Load() || r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		_, _ = fmt.Fprint(w, `{"items": [{"metadata": {"name": "engine-a"}, "spec": {"nodeName": "node-a"}},
			{"metadata": {"name": "pending"}, "spec": {}}]}`)
	}))
	defer server.Close()
	file := parameters(t, "http://x").TokenFile
	var lists atomic.Int32
	list := func(ctx context.Context) (map[string]string, error) {
		defer lists.Add(1)
		return listPods(ctx, server.Client(), server.URL, file)
	}
	table := &nodeTable{}
	if table.nodeOf("engine-a") != "" {
		t.Error("a node is known before the first list")
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { table.keep(ctx, list, time.Millisecond); close(done) }()
	wait := func(what string, isTrue func() bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !isTrue(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal(what)
			}
		}
	}
	wait("no list", func() bool { return table.nodeOf("engine-a") == "node-a" })
	isDown.Store(true)
	before := lists.Load()
	wait("no further list", func() bool { return lists.Load() > before+2 })
	if table.nodeOf("engine-a") != "node-a" || table.nodeOf("pending") != "" {
		t.Error("the table was lost")
	}
	cancel()
	<-done
}
