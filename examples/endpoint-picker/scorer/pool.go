package scorer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

const (
	maxAnswer = 1 << 20 // bytes
	maxToken  = 4 << 10
	inFlight  = 64 // queries at the same time; further ones have no answer
)

var errBusy = errors.New("the pool is not queried now")

// reach is the pool's answer: chunks of the prompt from the first on, by node, and on the shared tier.
type reach struct {
	Nodes  map[string]int `json:"nodes"`
	Shared int            `json:"shared"`
}

type question struct {
	Tenant      string   `json:"tenant"`
	Fingerprint string   `json:"fingerprint"`
	Hashes      []string `json:"hashes"`
}

// pool queries POST /prefixes of the sidecars. After a failure it is not queried for `pause`.
type pool struct {
	url       string
	tokenFile string
	timeout   time.Duration
	pause     time.Duration
	client    *http.Client
	places    chan struct{}
	resumeAt  atomic.Int64 // Unix nanoseconds
}

func newPool(url, tokenFile string, timeout, pause time.Duration) *pool {
	transport := &http.Transport{MaxIdleConnsPerHost: inFlight, MaxConnsPerHost: inFlight, IdleConnTimeout: time.Minute}
	return &pool{
		url: url, tokenFile: tokenFile, timeout: timeout, pause: pause,
		client: &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // the token is for this address only
		}},
		places: make(chan struct{}, inFlight),
	}
}

// ask returns within the timeout, whatever the pool does.
func (p *pool) ask(ctx context.Context, asked question) (reach, error) {
	if time.Now().UnixNano() < p.resumeAt.Load() {
		return reach{}, errBusy
	}
	select {
	case p.places <- struct{}{}:
		defer func() { <-p.places }()
	default:
		return reach{}, errBusy
	}
	bounded, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	found, err := p.post(bounded, asked)
	if err != nil && ctx.Err() == nil {
		p.resumeAt.Store(time.Now().Add(p.pause).UnixNano())
	}
	return found, err
}

func (p *pool) post(ctx context.Context, asked question) (reach, error) {
	token, err := readToken(p.tokenFile)
	if err != nil {
		return reach{}, err
	}
	body, err := json.Marshal(asked)
	if err != nil {
		return reach{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, bytes.NewReader(body))
	if err != nil {
		return reach{}, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	answer, err := p.client.Do(request)
	if err != nil {
		return reach{}, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return reach{}, fmt.Errorf("the pool answers with status %d", answer.StatusCode)
	}
	var found reach
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxAnswer)).Decode(&found); err != nil {
		return reach{}, err
	}
	return found, nil
}

// readToken reads the key `token` of the Secret NAME-events, which may change while it is mounted.
func readToken(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxToken))
	return strings.TrimSpace(string(text)), err
}
