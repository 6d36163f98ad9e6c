// Package scorer scores endpoints by how much of a prompt a KVPool holds near them. It is a plug-in of the endpoint
// picker of the Gateway API Inference Extension. If the pool does not answer in time, each endpoint has score 0.
package scorer

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"time"

	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/plugin"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/scheduling"
)

// Type is the name of the plug-in in the picker's configuration.
const Type = "kvpool-prefix-scorer"

const (
	maxChunks  = 4096 // of one query to the pool
	maxTimeout = time.Second
)

// Parameters of the plug-in. Blocks are those of vLLM, chunks those of the pool (`cache.blockTokens`).
type Parameters struct {
	URL         string   `json:"url"`         // POST /prefixes of the sidecars
	TokenFile   string   `json:"tokenFile"`   // key `token` of the Secret NAME-events, mounted
	Tenant      string   `json:"tenant"`      // namespace of the engines
	Fingerprint string   `json:"fingerprint"` // of the engines, 64 hexadecimal digits, as in status.fingerprints
	Models      []string `json:"models"`      // target models that the engines serve without an adapter; empty: all
	BlockTokens int      `json:"blockTokens"` // 16
	ChunkTokens int      `json:"chunkTokens"` // 256
	HashSeed    *string  `json:"hashSeed"`    // PYTHONHASHSEED of the engines: "0"
	Timeout     string   `json:"timeout"`     // of a query: 10ms
	Pause       string   `json:"pause"`       // without queries after a failure: 1s
	Local       *float64 `json:"local"`       // weight of chunks on the endpoint's node: 1
	Peer        *float64 `json:"peer"`        // of further chunks on another node: 0.5
	Shared      *float64 `json:"shared"`      // of further chunks on the shared tier: 0.25
}

// Scorer implements scheduling.Scorer. Safe for concurrent use.
type Scorer struct {
	name        plugin.TypedName
	tenant      string
	fingerprint string
	models      map[string]bool
	block       int
	chunk       int
	seed        string
	weights     [3]float64 // local, peer, shared
	pool        *pool
	nodeOf      func(pod string) string
}

var _ scheduling.Scorer = (*Scorer)(nil)

// Register makes the plug-in known to the picker; call it before the picker's runner starts.
func Register() { plugin.Register(Type, Factory) }

// Factory builds the plug-in from the picker's configuration.
func Factory(name string, raw json.RawMessage, handle plugin.Handle) (plugin.Plugin, error) {
	var parameters Parameters
	if err := json.Unmarshal(raw, &parameters); err != nil {
		return nil, fmt.Errorf("%s: %w", Type, err)
	}
	table := &nodeTable{}
	made, err := New(name, parameters, table.nodeOf)
	if err != nil {
		return nil, err
	}
	list, err := inCluster(parameters.Tenant)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Type, err)
	}
	go table.keep(handle.Context(), list, listEvery)
	return made, nil
}

// New checks the parameters. `nodeOf` returns the node of a pod, empty if it is unknown; it must not wait.
func New(name string, p Parameters, nodeOf func(pod string) string) (*Scorer, error) {
	made := &Scorer{
		name: plugin.TypedName{Type: Type, Name: name}, tenant: p.Tenant, fingerprint: p.Fingerprint,
		models: map[string]bool{}, block: valueOr(p.BlockTokens, 16), chunk: valueOr(p.ChunkTokens, 256), seed: "0",
		weights: [3]float64{1, 0.5, 0.25}, nodeOf: nodeOf,
	}
	if p.HashSeed != nil {
		made.seed = *p.HashSeed
	}
	for _, model := range p.Models {
		made.models[model] = true
	}
	for n, weight := range []*float64{p.Local, p.Peer, p.Shared} {
		if weight != nil {
			made.weights[n] = *weight
		}
		if made.weights[n] < 0 || made.weights[n] > 1 {
			return nil, fmt.Errorf("%s: weights are from 0 to 1", Type)
		}
	}
	if digits, err := hex.DecodeString(p.Fingerprint); err != nil || len(digits) != 32 {
		return nil, fmt.Errorf("%s: fingerprint must have 64 hexadecimal digits", Type)
	}
	if made.block <= 0 || made.chunk <= 0 || made.chunk%made.block != 0 {
		return nil, fmt.Errorf("%s: chunkTokens must be a multiple of blockTokens", Type)
	}
	if parsed, err := url.Parse(p.URL); err != nil || parsed.Host == "" || p.Tenant == "" {
		return nil, errors.New(Type + ": url and tenant are required")
	}
	timeout, err := durationOr(p.Timeout, 10*time.Millisecond)
	if err != nil {
		return nil, err
	}
	pause, err := durationOr(p.Pause, time.Second)
	if err != nil {
		return nil, err
	}
	made.pool = newPool(p.URL, p.TokenFile, min(timeout, maxTimeout), pause)
	return made, nil
}

// TypedName returns type and name of the plug-in.
func (s *Scorer) TypedName() plugin.TypedName { return s.name }

// Category says that the scorer prefers endpoints that have the prompt.
func (s *Scorer) Category() scheduling.ScorerCategory { return scheduling.Affinity }

// Score returns a score from 0 to 1 for each endpoint: the weighted part of the prompt that it can load.
func (s *Scorer) Score(
	ctx context.Context, _ *scheduling.CycleState, request *scheduling.LLMRequest, endpoints []scheduling.Endpoint,
) map[scheduling.Endpoint]float64 {
	scores := make(map[scheduling.Endpoint]float64, len(endpoints))
	for _, endpoint := range endpoints {
		scores[endpoint] = 0
	}
	hashes := s.chunkHashes(request)
	if len(hashes) == 0 || len(endpoints) == 0 {
		return scores
	}
	found, err := s.pool.ask(ctx, question{s.tenant, s.fingerprint, hashes})
	if err != nil {
		return scores
	}
	for _, endpoint := range endpoints {
		if metadata := endpoint.GetMetadata(); metadata != nil {
			scores[endpoint] = s.score(found, s.nodeOf(metadata.PodName), len(hashes))
		}
	}
	return scores
}

// chunkHashes returns the hash of each chunk's last block; none if the engine's hashes depend on more than the tokens.
func (s *Scorer) chunkHashes(request *scheduling.LLMRequest) []string {
	if request == nil || request.TokenizedPrompt == nil || len(request.TokenizedPrompt.MultiModalFeatures) > 0 {
		return nil
	}
	if request.Body != nil && request.Body.CacheSalt() != "" {
		return nil
	}
	if len(s.models) > 0 && !s.models[request.TargetModel] {
		return nil
	}
	per := s.chunk / s.block
	blocks := blockHashes(request.TokenizedPrompt.TokenIDs, s.block, s.seed, maxChunks*per)
	hashes := make([]string, 0, len(blocks)/per)
	for n := per - 1; n < len(blocks); n += per {
		hashes = append(hashes, hex.EncodeToString(blocks[n][:]))
	}
	return hashes
}

func (s *Scorer) score(found reach, node string, chunks int) float64 {
	peer := 0
	for _, count := range found.Nodes {
		peer = max(peer, count)
	}
	local := 0
	if node != "" {
		local = found.Nodes[node]
	}
	further := max(0, peer-local)
	shared := max(0, found.Shared-max(local, peer))
	sum := s.weights[0]*float64(local) + s.weights[1]*float64(further) + s.weights[2]*float64(shared)
	return max(0, min(1, sum/float64(chunks)))
}

func valueOr(value, preset int) int {
	if value == 0 {
		return preset
	}
	return value
}

func durationOr(text string, preset time.Duration) (time.Duration, error) {
	if text == "" {
		return preset, nil
	}
	value, err := time.ParseDuration(text)
	if err != nil || value <= 0 {
		return 0, fmt.Errorf("%s: %q is not a time", Type, text)
	}
	return value, nil
}
